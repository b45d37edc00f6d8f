"""Data parallelism over two CPU workers: step time and memory beside torch's DDP, one process, and no communication at all."""
