"""What it costs: time, throughput, memory."""
