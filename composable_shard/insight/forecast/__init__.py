"""What a step will take, found out without the devices."""
