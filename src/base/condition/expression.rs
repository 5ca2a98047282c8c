//! A compiled condition: a tree in which every type has been checked.
//!
//! `cel` parses the text, but its interpreter is not used. That interpreter builds an error for each
//! comparison before it knows whether there is an error, compiles a pattern at each call, and overflows
//! its stack on a deep tree. The evaluation here visits each node at most once. The evaluation
//! allocates only to read metadata that is a number, a list or an object. The evaluation fails only if
//! a whole number overflows or is divided by zero. A test checks that this evaluation and CEL's agree.

use std::borrow::Cow;
use std::cmp::Ordering;

use regex::Regex;

/// The values of the facts of one event.
pub trait FactValues<F> {
    /// Returns the value of a fact.
    fn read_fact<'a>(&'a self, fact: &'a F) -> RuleValue<'a>;
}

/// A node of a condition over facts of the type `F`.
#[derive(Debug)]
pub enum RuleExpr<F> {
    Literal(RuleLiteral),
    Fact(F),
    Unary(UnaryOperator, Box<Self>),
    Binary(BinaryOperator, Box<[Self; 2]>),
    /// The second part if the first part is true, otherwise the third part.
    Choose(Box<[Self; 3]>),
    In(Box<Self>, Box<[Self]>),
    Matches(Box<Self>, Regex),
}

#[derive(Debug)]
pub enum RuleLiteral {
    Bool(bool),
    Int(i64),
    Double(f64),
    Text(Box<str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnaryOperator {
    Not,
    Negate,
    /// The length of a text, in characters.
    Size,
    /// The conversion of a whole number to a double.
    Double,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BinaryOperator {
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

/// The type of a node, known before evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleValueType {
    Bool,
    Int,
    Double,
    Text,
}

/// The value of a node for one call.
#[derive(Clone, Debug, PartialEq)]
pub enum RuleValue<'a> {
    Bool(bool),
    Int(i64),
    Double(f64),
    Text(Cow<'a, str>),
}

/// A reason why a condition cannot be evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleEvalError {
    #[error("a number is larger than 64 bits hold")]
    Overflow,
    #[error("a number is divided by zero")]
    DivisionByZero,
    #[error("a value does not have the type that was checked")]
    TypeMismatch,
}

impl<F> RuleExpr<F> {
    /// Returns true if the condition holds.
    ///
    /// # Errors
    /// Returns an error if a whole number overflows or is divided by zero.
    pub fn eval_bool(&self, facts: &impl FactValues<F>) -> Result<bool, RuleEvalError> {
        match self.eval_node(facts)? {
            RuleValue::Bool(holds) => Ok(holds),
            _ => Err(RuleEvalError::TypeMismatch),
        }
    }

    fn eval_node<'a>(
        &'a self,
        facts: &'a impl FactValues<F>,
    ) -> Result<RuleValue<'a>, RuleEvalError> {
        match self {
            Self::Literal(literal) => Ok(literal.to_value()),
            Self::Fact(fact) => Ok(facts.read_fact(fact)),
            Self::Unary(unary, operand) => unary.apply_to(operand.eval_node(facts)?),
            // `&&` and `||` evaluate their right side only if needed, so they cannot share the code of
            // the other operators.
            Self::Binary(BinaryOperator::And, operands) => {
                eval_short_circuit(operands, facts, false)
            }
            Self::Binary(BinaryOperator::Or, operands) => eval_short_circuit(operands, facts, true),
            Self::Binary(binary, operands) => {
                let [left, right] = &**operands;
                binary.apply_to(&left.eval_node(facts)?, &right.eval_node(facts)?)
            }
            Self::Choose(parts) => {
                let [condition, yes, no] = &**parts;
                if condition.eval_bool(facts)? { yes.eval_node(facts) } else { no.eval_node(facts) }
            }
            Self::In(operand, list) => {
                let value = operand.eval_node(facts)?;
                for one in list {
                    if value.compare(&one.eval_node(facts)?) == Some(Ordering::Equal) {
                        return Ok(RuleValue::Bool(true));
                    }
                }
                Ok(RuleValue::Bool(false))
            }
            Self::Matches(operand, pattern) => match operand.eval_node(facts)? {
                RuleValue::Text(text) => Ok(RuleValue::Bool(pattern.is_match(&text))),
                _ => Err(RuleEvalError::TypeMismatch),
            },
        }
    }
}

/// Evaluates `&&` (`decisive` is false) or `||` (`decisive` is true).
///
/// As in CEL, a decisive side outweighs a failure of the other side.
fn eval_short_circuit<'a, F>(
    operands: &[RuleExpr<F>; 2],
    facts: &impl FactValues<F>,
    decisive: bool,
) -> Result<RuleValue<'a>, RuleEvalError> {
    let [left, right] = operands;
    let left = left.eval_bool(facts);
    if left == Ok(decisive) {
        return Ok(RuleValue::Bool(decisive));
    }
    // The left side is not decisive or failed. A failure of the right side is returned here.
    let right = right.eval_bool(facts)?;
    // A decisive right side hides a failure of the left side; otherwise the left side, or its failure,
    // is the result.
    if right == decisive { Ok(RuleValue::Bool(decisive)) } else { left.map(RuleValue::Bool) }
}

impl RuleLiteral {
    pub fn value_type(&self) -> RuleValueType {
        self.to_value().value_type()
    }

    fn to_value(&self) -> RuleValue<'_> {
        match self {
            Self::Bool(bool) => RuleValue::Bool(*bool),
            Self::Int(int) => RuleValue::Int(*int),
            Self::Double(double) => RuleValue::Double(*double),
            Self::Text(text) => RuleValue::Text(Cow::Borrowed(text)),
        }
    }
}

impl UnaryOperator {
    /// Returns the type of the result for an operand's type, or `None` if the operator does not accept
    /// the operand.
    pub fn result_type(self, operand: RuleValueType) -> Option<RuleValueType> {
        match (self, operand) {
            (Self::Not, RuleValueType::Bool) => Some(RuleValueType::Bool),
            (Self::Negate, RuleValueType::Int | RuleValueType::Double) => Some(operand),
            (Self::Size, RuleValueType::Text) => Some(RuleValueType::Int),
            (Self::Double, RuleValueType::Int | RuleValueType::Double) => {
                Some(RuleValueType::Double)
            }
            _ => None,
        }
    }

    fn apply_to(self, operand: RuleValue<'_>) -> Result<RuleValue<'static>, RuleEvalError> {
        match (self, operand) {
            (Self::Not, RuleValue::Bool(bool)) => Ok(RuleValue::Bool(!bool)),
            (Self::Negate, RuleValue::Int(int)) => checked_int(int.checked_neg()),
            (Self::Negate, RuleValue::Double(double)) => Ok(RuleValue::Double(-double)),
            (Self::Size, RuleValue::Text(text)) => {
                checked_int(i64::try_from(text.chars().count()).ok())
            }
            (Self::Double, RuleValue::Int(int)) => Ok(RuleValue::Double(int_to_double(int))),
            (Self::Double, RuleValue::Double(double)) => Ok(RuleValue::Double(double)),
            _ => Err(RuleEvalError::TypeMismatch),
        }
    }
}

impl BinaryOperator {
    /// Returns the type of the result for two operands' types, or `None` if the operator does not
    /// accept the operands.
    pub fn result_type(self, left: RuleValueType, right: RuleValueType) -> Option<RuleValueType> {
        let (comparable, same) = (left.is_comparable(right), left == right);
        match self {
            Self::And | Self::Or => {
                (same && left == RuleValueType::Bool).then_some(RuleValueType::Bool)
            }
            Self::Equal | Self::NotEqual => comparable.then_some(RuleValueType::Bool),
            Self::Less | Self::LessOrEqual | Self::Greater | Self::GreaterOrEqual => {
                (comparable && left != RuleValueType::Bool).then_some(RuleValueType::Bool)
            }
            Self::Add | Self::Subtract | Self::Multiply | Self::Divide => {
                (same && left.is_number()).then_some(left)
            }
            Self::Remainder => (same && left == RuleValueType::Int).then_some(RuleValueType::Int),
            Self::StartsWith | Self::EndsWith | Self::Contains => {
                (same && left == RuleValueType::Text).then_some(RuleValueType::Bool)
            }
        }
    }

    fn apply_to(
        self,
        left: &RuleValue<'_>,
        right: &RuleValue<'_>,
    ) -> Result<RuleValue<'static>, RuleEvalError> {
        // The types were checked when the rule was loaded; only comparisons accept operands of two
        // different types.
        match (left, right) {
            (RuleValue::Int(left), RuleValue::Int(right)) if self.is_arithmetic() => {
                self.apply_to_ints(*left, *right)
            }
            (RuleValue::Double(left), RuleValue::Double(right)) if self.is_arithmetic() => {
                self.apply_to_doubles(*left, *right)
            }
            (RuleValue::Text(left), RuleValue::Text(right)) if self.is_search() => {
                Ok(RuleValue::Bool(match self {
                    Self::StartsWith => left.starts_with(&**right),
                    Self::EndsWith => left.ends_with(&**right),
                    _ => left.contains(&**right),
                }))
            }
            _ => Ok(RuleValue::Bool(self.test_ordering(left.compare(right))?)),
        }
    }

    fn apply_to_ints(self, left: i64, right: i64) -> Result<RuleValue<'static>, RuleEvalError> {
        match self {
            Self::Divide | Self::Remainder if right == 0 => Err(RuleEvalError::DivisionByZero),
            Self::Add => checked_int(left.checked_add(right)),
            Self::Subtract => checked_int(left.checked_sub(right)),
            Self::Multiply => checked_int(left.checked_mul(right)),
            Self::Divide => checked_int(left.checked_div(right)),
            // The checked functions also catch `i64::MIN / -1` and `i64::MIN % -1`, which overflow.
            _ => checked_int(left.checked_rem(right)),
        }
    }

    fn apply_to_doubles(self, left: f64, right: f64) -> Result<RuleValue<'static>, RuleEvalError> {
        match self {
            Self::Add => Ok(RuleValue::Double(left + right)),
            Self::Subtract => Ok(RuleValue::Double(left - right)),
            Self::Multiply => Ok(RuleValue::Double(left * right)),
            Self::Divide => Ok(RuleValue::Double(left / right)),
            _ => Err(RuleEvalError::TypeMismatch),
        }
    }

    /// Tests the result of a comparison. `None` means NaN: every test of NaN is false, except `!=`.
    fn test_ordering(self, order: Option<Ordering>) -> Result<bool, RuleEvalError> {
        match self {
            Self::Equal => Ok(order.is_some_and(Ordering::is_eq)),
            Self::NotEqual => Ok(!order.is_some_and(Ordering::is_eq)),
            Self::Less => Ok(order.is_some_and(Ordering::is_lt)),
            Self::LessOrEqual => Ok(order.is_some_and(Ordering::is_le)),
            Self::Greater => Ok(order.is_some_and(Ordering::is_gt)),
            Self::GreaterOrEqual => Ok(order.is_some_and(Ordering::is_ge)),
            _ => Err(RuleEvalError::TypeMismatch),
        }
    }

    fn is_arithmetic(self) -> bool {
        use BinaryOperator::{Add, Divide, Multiply, Remainder, Subtract};
        matches!(self, Add | Subtract | Multiply | Divide | Remainder)
    }

    fn is_search(self) -> bool {
        matches!(self, Self::StartsWith | Self::EndsWith | Self::Contains)
    }
}

impl RuleValueType {
    /// Returns CEL's word for the type, with an article, for use in a sentence.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "a bool",
            Self::Int => "an int",
            Self::Double => "a double",
            Self::Text => "a string",
        }
    }

    pub fn is_comparable(self, other: Self) -> bool {
        self == other || (self.is_number() && other.is_number())
    }

    fn is_number(self) -> bool {
        matches!(self, Self::Int | Self::Double)
    }
}

impl RuleValue<'_> {
    fn value_type(&self) -> RuleValueType {
        match self {
            RuleValue::Bool(_) => RuleValueType::Bool,
            RuleValue::Int(_) => RuleValueType::Int,
            RuleValue::Double(_) => RuleValueType::Double,
            RuleValue::Text(_) => RuleValueType::Text,
        }
    }

    fn compare(&self, other: &RuleValue<'_>) -> Option<Ordering> {
        match (self, other) {
            (RuleValue::Bool(one), RuleValue::Bool(other)) => one.partial_cmp(other),
            (RuleValue::Int(one), RuleValue::Int(other)) => one.partial_cmp(other),
            (RuleValue::Double(one), RuleValue::Double(other)) => one.partial_cmp(other),
            (RuleValue::Int(one), RuleValue::Double(other)) => {
                int_to_double(*one).partial_cmp(other)
            }
            (RuleValue::Double(one), RuleValue::Int(other)) => {
                one.partial_cmp(&int_to_double(*other))
            }
            (RuleValue::Text(one), RuleValue::Text(other)) => one.partial_cmp(other),
            _ => None,
        }
    }
}

fn checked_int(int: Option<i64>) -> Result<RuleValue<'static>, RuleEvalError> {
    int.map(RuleValue::Int).ok_or(RuleEvalError::Overflow)
}

#[expect(clippy::cast_precision_loss, reason = "CEL compares whole numbers with doubles so")]
fn int_to_double(int: i64) -> f64 {
    int as f64
}
