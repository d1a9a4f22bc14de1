"""Files: atomic writing, folders of results, and the one reader of JSON and YAML."""
