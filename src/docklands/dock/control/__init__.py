"""The control process: the rules of all stages behind one socket, its clients, and what it does after a loss."""
