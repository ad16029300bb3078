"""Studies: plans, slots and queues."""
