"""Who runs in the next step, and with how much draft. No torch: the same code drives a device or a virtual clock."""
