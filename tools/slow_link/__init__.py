"""Ring attention between network namespaces of one machine, over links of a rate that is set."""
