"""Solutions of H V = B for blocks of right-hand sides, where H is a kernel matrix plus noise."""
