"""One process of several, simulated on one machine: what DDP or FSDP2 makes of a model in each rank."""
