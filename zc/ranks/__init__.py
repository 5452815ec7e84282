"""Process groups, hosts, and ranks that disagree."""
