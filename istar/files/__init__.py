"""Files: atomic writing, folders of results, what a folder contains, and the one reader of JSON and YAML."""
