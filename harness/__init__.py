"""The test harness of staged-sync. It imports `staged_sync`; the library never imports it."""
