//! Conditions in CEL over named facts: the text is checked when it is loaded, and its evaluation has a bounded cost.
//!
//! A caller describes its facts with a [`FactTable`], compiles a text with [`compile_condition`], and evaluates the tree
//! with the [`FactValues`] of one event.

mod compile;
mod expression;

pub use compile::{RuleCompileError, compile_condition};
pub use expression::{FactValues, RuleEvalError, RuleExpr, RuleValue, RuleValueType};

/// The names that a condition may use, with their types.
pub trait FactTable: Sync {
    /// The compiled form of a name.
    type Fact: Send;

    /// Returns the fact of a dotted name.
    fn find_fact(&self, path: &[&str]) -> Option<(Self::Fact, RuleValueType)>;

    /// Returns the names that may follow `prefix` and a dot.
    fn names_under(&self, prefix: &str) -> Vec<String>;

    /// Returns the first parts of all names, for an error message.
    fn roots(&self) -> &'static str;

    /// Returns the name of a fact and all values that it can have, if the values are a fixed set of words.
    fn allowed_values(&self, fact: &Self::Fact) -> Option<(String, Vec<String>)>;
}
