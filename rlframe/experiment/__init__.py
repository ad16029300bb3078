"""From key=value settings to a trained run: config, presets, trust, hardware, build and train."""
