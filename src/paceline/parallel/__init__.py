"""The classic wrappers, for whoever has a training loop already: one line changes, the loop stays.

    DataParallel              one process: replicas in threads, the rows of every call dealt out to them
    DistributedDataParallel   one process per replica, started by torchrun or the like

Both know a module's inputs and outputs, and not the loss that is made of them; what follows from that only `Trainer` can keep.
"""
