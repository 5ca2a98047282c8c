//! What the tests of several rooms share.

pub(crate) mod provider;
