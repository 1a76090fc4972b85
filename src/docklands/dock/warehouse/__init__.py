"""Warehouses: the bytes, in one process or behind a socket, with shared memory, a log and a replica."""
