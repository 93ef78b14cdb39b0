"""Turn settings into a running pipeline; no lower package imports this one."""
