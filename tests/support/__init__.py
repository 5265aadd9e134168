"""What tests of streams need: a device that is not there, and what happens before what."""
