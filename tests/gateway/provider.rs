//! The fake provider over raw TCP: what it puts on the wire, how it fails, what it remembers.

mod client;
mod command;
mod fault;
mod pace;
mod record;
mod script;
mod shape;
