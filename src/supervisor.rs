//! The runs of a service: accepted, started, watched and brought to a definite end, whatever happens to the process.
