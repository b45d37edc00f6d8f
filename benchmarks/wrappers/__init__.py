"""The wrappers for a loop that exists already: step time and memory beside torch's DDP and the loop without a wrapper."""
