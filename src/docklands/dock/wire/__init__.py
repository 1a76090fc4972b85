"""How the dock's processes talk: the format of messages, sockets with keys, the command line of a server."""
