"""Cost before anything runs: work by rank and step, bytes by link, memory and seconds."""
