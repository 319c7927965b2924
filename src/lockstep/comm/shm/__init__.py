"""The one-host backend, "shm": ranks of one machine pass tensors through shared memory instead of loopback TCP.

From the bottom up:

    segment.py     a named piece of memory that several processes map, and that never outlives them
    semaphore.py   waiting for another process without burning a core
    board.py       where each rank shows a chunk to all others: the collectives' memory
    mailbox.py     where one rank hands chunks to one other: send and receive
    operations.py  every collective, written over the board
    shared.py      tensors that live in shared memory, and are reduced in place
    rendezvous.py  how the ranks of a group find each other and their memory
    memory.py      which tensors the backend accepts
    group.py       the process group for torch.distributed
"""
