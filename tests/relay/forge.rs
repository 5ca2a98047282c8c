//! The stand-in for GitHub, and the relay's calls to it.

mod access;
mod credential;
mod exchange;
mod pull_request;
mod text;
