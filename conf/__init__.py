"""Configuration groups of the command `cbtriton`, shipped as the package `cbtriton.conf`."""
