"""Importing this imports the bridges: for hosts, which import what they fork by name."""

from harness.bridge_cpu import import_bridges

import_bridges()
