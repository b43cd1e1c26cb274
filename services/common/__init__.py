"""What every binary shares: errors, configuration, logs, server, model files."""
