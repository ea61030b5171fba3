"""HOW attention is computed: the operations of a backend, the reference, merging, and the function of one device."""
