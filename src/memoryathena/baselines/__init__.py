"""What a memory is compared with. They learn from the rows, and are measured by the loss, of `training`."""
