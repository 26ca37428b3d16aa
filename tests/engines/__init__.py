"""Engines that only tests use: system calls traced and failed, a disk that loses power, crash points one by one."""
