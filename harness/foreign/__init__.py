"""Other people's `UpdateWeightFromDistributed`, unmodified, in the simulator. See docs/test-your-implementation.md."""
