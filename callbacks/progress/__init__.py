"""Progress bars and summaries of a run."""
