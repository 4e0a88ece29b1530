"""Where rows come from: files of each format, as blocks of columns."""
