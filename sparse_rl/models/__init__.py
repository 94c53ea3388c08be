"""Models on disk and in memory."""
