"""Machines for dock_scaling.py and the tests: network namespaces with addresses of their own."""
