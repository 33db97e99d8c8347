"""The bug zoo: small defects of the library, each after a public report, each caught by a named test."""
