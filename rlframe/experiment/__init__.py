"""From key=value words to live objects: the config of a run, its presets, and the machine it runs on."""
