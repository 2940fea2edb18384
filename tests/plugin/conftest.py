collect_ignore = ["package"]  # its tests run where it is installed
