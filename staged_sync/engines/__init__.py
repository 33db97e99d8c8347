"""Control-plane adapters: things with vime's method names (docs/seam.md) around engines that are not Ray actors."""
