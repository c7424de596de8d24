"""What a memory is compared with, each run on the same text and measured in the same way."""
