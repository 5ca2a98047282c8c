//! A condition that is ready to be asked: a tree in which every type has been checked.
//!
//! `cel` reads the text; its interpreter is not used. That one builds an error for each comparison
//! before it knows whether there is one, compiles a pattern at each call, and overflows its stack
//! where a tree is deep. Here a condition costs one visit to each of its nodes at most, allocates
//! nothing, and fails only where a whole number overflows or is divided by zero. A test checks that
//! both say the same.

use std::borrow::Cow;
use std::cmp::Ordering;

use regex::Regex;

use super::facts::{Fact, Facts};

/// A part of a condition.
#[derive(Debug)]
pub(super) enum Node {
    Literal(Literal),
    Fact(Fact),
    /// The text of that name in the run's metadata.
    Metadata(Box<str>),
    Unary(Unary, Box<Self>),
    Binary(Binary, Box<[Self; 2]>),
    /// The second where the first is true, else the third.
    Choose(Box<[Self; 3]>),
    In(Box<Self>, Box<[Self]>),
    Matches(Box<Self>, Regex),
}

#[derive(Debug)]
pub(super) enum Literal {
    Bool(bool),
    Int(i64),
    Double(f64),
    Text(Box<str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unary {
    Not,
    Negate,
    /// The length of a text, in characters.
    Size,
    /// A whole number as a double.
    Double,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Binary {
    And,
    Or,
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
    StartsWith,
    EndsWith,
    Contains,
}

/// What a part is, known before it is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Bool,
    Int,
    Double,
    Text,
}

/// What a part says of a call.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Bool(bool),
    Int(i64),
    Double(f64),
    Text(Cow<'a, str>),
}

/// Why a condition has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("a number is larger than 64 bits hold")]
    Overflow,
    #[error("a number is divided by zero")]
    DivisionByZero,
    #[error("a value is not of the kind that was checked")]
    Kind,
}

impl Node {
    /// Whether the condition holds.
    pub(super) fn holds(&self, facts: &Facts<'_>) -> Result<bool, Fault> {
        match self.value(facts)? {
            Value::Bool(holds) => Ok(holds),
            _ => Err(Fault::Kind),
        }
    }

    fn value<'a>(&'a self, facts: &'a Facts<'_>) -> Result<Value<'a>, Fault> {
        match self {
            Self::Literal(literal) => Ok(literal.value()),
            Self::Fact(fact) => Ok(fact.read(facts)),
            Self::Metadata(name) => Ok(Value::Text(facts.run.metadata(name))),
            Self::Unary(unary, operand) => unary.of(operand.value(facts)?),
            Self::Binary(Binary::And, operands) => either(operands, facts, false),
            Self::Binary(Binary::Or, operands) => either(operands, facts, true),
            Self::Binary(binary, operands) => {
                let [left, right] = &**operands;
                binary.of(&left.value(facts)?, &right.value(facts)?)
            }
            Self::Choose(parts) => {
                let [condition, yes, no] = &**parts;
                if condition.holds(facts)? { yes.value(facts) } else { no.value(facts) }
            }
            Self::In(operand, list) => {
                let value = operand.value(facts)?;
                for one in list {
                    if value.compare(&one.value(facts)?) == Some(Ordering::Equal) {
                        return Ok(Value::Bool(true));
                    }
                }
                Ok(Value::Bool(false))
            }
            Self::Matches(operand, pattern) => match operand.value(facts)? {
                Value::Text(text) => Ok(Value::Bool(pattern.is_match(&text))),
                _ => Err(Fault::Kind),
            },
        }
    }
}

/// `&&` (where `decisive` is false) and `||`: as CEL has it, one decisive side outweighs the other's
/// failure.
fn either<'a>(operands: &[Node; 2], facts: &Facts<'_>, decisive: bool) -> Result<Value<'a>, Fault> {
    let [left, right] = operands;
    let left = left.holds(facts);
    if left == Ok(decisive) {
        return Ok(Value::Bool(decisive));
    }
    let right = right.holds(facts)?;
    if right == decisive { Ok(Value::Bool(decisive)) } else { left.map(Value::Bool) }
}

impl Literal {
    pub(super) fn kind(&self) -> Kind {
        self.value().kind()
    }

    fn value(&self) -> Value<'_> {
        match self {
            Self::Bool(bool) => Value::Bool(*bool),
            Self::Int(int) => Value::Int(*int),
            Self::Double(double) => Value::Double(*double),
            Self::Text(text) => Value::Text(Cow::Borrowed(text)),
        }
    }
}

impl Unary {
    /// What comes of an operand of a kind; `None` where nothing does.
    pub(super) fn kind(self, operand: Kind) -> Option<Kind> {
        match (self, operand) {
            (Self::Not, Kind::Bool) => Some(Kind::Bool),
            (Self::Negate, Kind::Int | Kind::Double) => Some(operand),
            (Self::Size, Kind::Text) => Some(Kind::Int),
            (Self::Double, Kind::Int | Kind::Double) => Some(Kind::Double),
            _ => None,
        }
    }

    fn of(self, operand: Value<'_>) -> Result<Value<'static>, Fault> {
        match (self, operand) {
            (Self::Not, Value::Bool(bool)) => Ok(Value::Bool(!bool)),
            (Self::Negate, Value::Int(int)) => checked(int.checked_neg()),
            (Self::Negate, Value::Double(double)) => Ok(Value::Double(-double)),
            (Self::Size, Value::Text(text)) => checked(i64::try_from(text.chars().count()).ok()),
            (Self::Double, Value::Int(int)) => Ok(Value::Double(double(int))),
            (Self::Double, Value::Double(double)) => Ok(Value::Double(double)),
            _ => Err(Fault::Kind),
        }
    }
}

impl Binary {
    /// What comes of operands of two kinds; `None` where nothing does.
    pub(super) fn kind(self, left: Kind, right: Kind) -> Option<Kind> {
        let (comparable, same) = (left.is_comparable(right), left == right);
        match self {
            Self::And | Self::Or => (same && left == Kind::Bool).then_some(Kind::Bool),
            Self::Equal | Self::NotEqual => comparable.then_some(Kind::Bool),
            Self::Less | Self::LessOrEqual | Self::Greater | Self::GreaterOrEqual => {
                (comparable && left != Kind::Bool).then_some(Kind::Bool)
            }
            Self::Add | Self::Subtract | Self::Multiply | Self::Divide => {
                (same && left.is_number()).then_some(left)
            }
            Self::Remainder => (same && left == Kind::Int).then_some(Kind::Int),
            Self::StartsWith | Self::EndsWith | Self::Contains => {
                (same && left == Kind::Text).then_some(Kind::Bool)
            }
        }
    }

    fn of(self, left: &Value<'_>, right: &Value<'_>) -> Result<Value<'static>, Fault> {
        match (left, right) {
            (Value::Int(left), Value::Int(right)) if self.is_arithmetic() => {
                self.of_ints(*left, *right)
            }
            (Value::Double(left), Value::Double(right)) if self.is_arithmetic() => {
                self.of_doubles(*left, *right)
            }
            (Value::Text(left), Value::Text(right)) if self.is_search() => {
                Ok(Value::Bool(match self {
                    Self::StartsWith => left.starts_with(&**right),
                    Self::EndsWith => left.ends_with(&**right),
                    _ => left.contains(&**right),
                }))
            }
            _ => Ok(Value::Bool(self.of_order(left.compare(right))?)),
        }
    }

    fn of_ints(self, left: i64, right: i64) -> Result<Value<'static>, Fault> {
        match self {
            Self::Divide | Self::Remainder if right == 0 => Err(Fault::DivisionByZero),
            Self::Add => checked(left.checked_add(right)),
            Self::Subtract => checked(left.checked_sub(right)),
            Self::Multiply => checked(left.checked_mul(right)),
            Self::Divide => checked(left.checked_div(right)),
            _ => checked(left.checked_rem(right)),
        }
    }

    fn of_doubles(self, left: f64, right: f64) -> Result<Value<'static>, Fault> {
        match self {
            Self::Add => Ok(Value::Double(left + right)),
            Self::Subtract => Ok(Value::Double(left - right)),
            Self::Multiply => Ok(Value::Double(left * right)),
            Self::Divide => Ok(Value::Double(left / right)),
            _ => Err(Fault::Kind),
        }
    }

    /// A comparison; with what is not a number, every one is false but `!=`.
    fn of_order(self, order: Option<Ordering>) -> Result<bool, Fault> {
        match self {
            Self::Equal => Ok(order.is_some_and(Ordering::is_eq)),
            Self::NotEqual => Ok(!order.is_some_and(Ordering::is_eq)),
            Self::Less => Ok(order.is_some_and(Ordering::is_lt)),
            Self::LessOrEqual => Ok(order.is_some_and(Ordering::is_le)),
            Self::Greater => Ok(order.is_some_and(Ordering::is_gt)),
            Self::GreaterOrEqual => Ok(order.is_some_and(Ordering::is_ge)),
            _ => Err(Fault::Kind),
        }
    }

    fn is_arithmetic(self) -> bool {
        use Binary::{Add, Divide, Multiply, Remainder, Subtract};
        matches!(self, Add | Subtract | Multiply | Divide | Remainder)
    }

    fn is_search(self) -> bool {
        matches!(self, Self::StartsWith | Self::EndsWith | Self::Contains)
    }
}

impl Kind {
    /// The word that CEL has for it, as a sentence needs it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bool => "a bool",
            Self::Int => "an int",
            Self::Double => "a double",
            Self::Text => "a string",
        }
    }

    pub(super) fn is_comparable(self, other: Self) -> bool {
        self == other || (self.is_number() && other.is_number())
    }

    fn is_number(self) -> bool {
        matches!(self, Self::Int | Self::Double)
    }
}

impl Value<'_> {
    fn kind(&self) -> Kind {
        match self {
            Value::Bool(_) => Kind::Bool,
            Value::Int(_) => Kind::Int,
            Value::Double(_) => Kind::Double,
            Value::Text(_) => Kind::Text,
        }
    }

    fn compare(&self, other: &Value<'_>) -> Option<Ordering> {
        match (self, other) {
            (Value::Bool(one), Value::Bool(other)) => one.partial_cmp(other),
            (Value::Int(one), Value::Int(other)) => one.partial_cmp(other),
            (Value::Double(one), Value::Double(other)) => one.partial_cmp(other),
            (Value::Int(one), Value::Double(other)) => double(*one).partial_cmp(other),
            (Value::Double(one), Value::Int(other)) => one.partial_cmp(&double(*other)),
            (Value::Text(one), Value::Text(other)) => one.partial_cmp(other),
            _ => None,
        }
    }
}

fn checked(int: Option<i64>) -> Result<Value<'static>, Fault> {
    int.map(Value::Int).ok_or(Fault::Overflow)
}

#[expect(clippy::cast_precision_loss, reason = "CEL compares whole numbers with doubles so")]
fn double(int: i64) -> f64 {
    int as f64
}
