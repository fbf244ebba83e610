"""What a launch asks of the machine's GPUs, and how it sets them up."""
