"""Where samples' bytes come from: what data sets declare, reading ahead, and what is kept."""
