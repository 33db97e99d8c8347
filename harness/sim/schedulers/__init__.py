"""Who runs next: one small file per way of choosing."""
