"""What is known of the groups of a sharded model before they run."""
