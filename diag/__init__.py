"""The diagnosis library: discover -> read -> detect -> correlate -> report. Imports neither torch nor pdtrain."""
