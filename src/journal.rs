//! What the service remembers of its runs, so that nothing that was accepted is forgotten: a row for each, and the
//! events that its watchers were told.
