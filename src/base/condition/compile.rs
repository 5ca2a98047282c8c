//! Compiles the text of a condition into a checked tree: `cel` parses the text, then every name and
//! type is checked.
//!
//! Only the part of CEL with an obvious cost is accepted: facts, literals, operators and tests of
//! texts. There are no macros, no maps, no concatenation and no functions that make a value larger. So
//! the cost of a condition is its size.
//!
//! **Invariant:** no text panics, hangs or exhausts the stack, whatever the text contains. The parser
//! of `cel` needs about 130 KiB of stack for each open bracket (measured, unoptimised) and checks its
//! own limit too late. So brackets are counted before parsing, and the parser runs in a thread of its
//! own.

use std::thread::{self, ScopedJoinHandle};

use cel::common::ast::{CallExpr, Expr, IdedExpr, LiteralValue, SourceInfo, operators};
use cel::parser::ParseErrors;
use regex::{Regex, RegexBuilder};

use super::FactTable;
use super::expression::{BinaryOperator, RuleExpr, RuleLiteral, RuleValueType, UnaryOperator};

/// A mistake in a condition, with its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleCompileError {
    /// Line and column, counted from 1; `None` if the mistake concerns the whole condition.
    pub place: Option<(usize, usize)>,
    pub problem: String,
}

/// Compiles the text of a condition over the facts of a table into its tree.
///
/// # Errors
/// Returns the first mistake, with its position.
pub fn compile_condition<T: FactTable>(
    text: &str,
    table: &T,
) -> Result<RuleExpr<T::Fact>, RuleCompileError> {
    if text.len() > MAX_CONDITION_BYTES {
        return Err(whole_expression_error(format!(
            "is {} bytes long, the limit is {MAX_CONDITION_BYTES}",
            text.len()
        )));
    }
    // The count includes brackets inside of strings: it may be too high, but never too low.
    let opened = text.bytes().filter(|byte| b"([{?".contains(byte)).count();
    if opened > MAX_BRACKETS {
        return Err(whole_expression_error(format!(
            "has {opened} opening brackets and `?`, the limit is {MAX_BRACKETS}; make it two rules"
        )));
    }
    let compiling = thread::Builder::new().stack_size(PARSER_STACK_BYTES);
    // The parser's thread has a large stack, and `join` turns a panic of the parser into an error.
    thread::scope(|scope| {
        match compiling
            .spawn_scoped(scope, || parse_condition(text, table))
            .map(ScopedJoinHandle::join)
        {
            Ok(Ok(result)) => result,
            Ok(Err(_panic)) => {
                Err(whole_expression_error("cannot be read; write it more simply".to_owned()))
            }
            Err(error) => Err(whole_expression_error(format!(
                "cannot be read: no thread could be started: {error}"
            ))),
        }
    })
}

fn whole_expression_error(problem: String) -> RuleCompileError {
    RuleCompileError { place: None, problem }
}

fn parse_condition<T: FactTable>(
    text: &str,
    table: &T,
) -> Result<RuleExpr<T::Fact>, RuleCompileError> {
    // The environment has no macros, so a macro looks like a call of an unknown function.
    let parser = cel::Env::default().with_optional_support(false).parser();
    let (expression, source) =
        parser.parse_with_source_info(text).map_err(|errors| syntax_error(&errors))?;
    let mut checker = RuleTypeChecker { table, source, nodes: 0 };
    let (node, kind) = checker.check_node(&expression)?;
    if kind == RuleValueType::Bool {
        Ok(node)
    } else {
        Err(whole_expression_error(format!("is {}; it has to be true or false", kind.name())))
    }
}

/// Returns the first error, without the list of all tokens that would have been possible.
fn syntax_error(errors: &ParseErrors) -> RuleCompileError {
    let Some(first) = errors.errors.first() else {
        return whole_expression_error("is not CEL".to_owned());
    };
    let message = first.msg.trim_start_matches("Syntax error: ");
    let message = message.split(" expecting ").next().unwrap_or_default();
    let message = message.replace("mismatched input '<EOF>'", "the expression ends too early");
    let message = message.replace("'<EOF>'", "the end");
    let place = |(line, column)| Some((usize::try_from(line).ok()?, usize::try_from(column).ok()?));
    RuleCompileError { place: place(first.pos), problem: format!("is not CEL: {message}") }
}

struct RuleTypeChecker<'t, T> {
    table: &'t T,
    source: SourceInfo,
    nodes: usize,
}

impl<T: FactTable> RuleTypeChecker<'_, T> {
    fn check_node(
        &mut self,
        expression: &IdedExpr,
    ) -> Result<(RuleExpr<T::Fact>, RuleValueType), RuleCompileError> {
        self.nodes += 1;
        // The count bounds the depth of the recursion below as well as its work.
        if self.nodes > MAX_NODES {
            return Err(whole_expression_error(format!(
                "has more than {MAX_NODES} names, values and operators; make it two rules"
            )));
        }
        // Try a dotted name first: `a.b` and `a["b"]` parse as different nodes and mean the same fact.
        if let Some(path) = dotted_path(&expression.expr) {
            return self.check_context_field(expression, &path);
        }
        match &expression.expr {
            Expr::Literal(value) => self.check_literal(expression, value),
            Expr::Select(_) => Err(self.error_at(expression, "only facts have parts")),
            Expr::Call(call) if call.func_name == operators::INDEX => {
                Err(self.error_at(expression, "only facts have parts"))
            }
            Expr::Call(call) => self.check_call(expression, call),
            Expr::List(_) => Err(self.error_at(expression, "a list may stand after `in` only")),
            _ => Err(self.error_at(expression, "maps and structs are not known here")),
        }
    }

    fn check_context_field(
        &self,
        place: &IdedExpr,
        path: &[&str],
    ) -> Result<(RuleExpr<T::Fact>, RuleValueType), RuleCompileError> {
        if let Some((fact, kind)) = self.table.find_fact(path) {
            return Ok((RuleExpr::Fact(fact), kind));
        }
        let name = path.join(".");
        // For the error message, list the names below the given name or, if there are none, the names
        // beside it.
        let parent = path[..path.len() - 1].join(".");
        let prefixes = [name.as_str(), parent.as_str()].into_iter();
        let known = prefixes
            .map(|prefix| (prefix, self.table.names_under(prefix)))
            .find(|(_, below)| !below.is_empty());
        let known = known.map_or_else(
            || format!("facts begin with {}", self.table.roots()),
            |(prefix, below)| format!("`{prefix}` has `{}`", below.join("`, `")),
        );
        Err(self.error_at(path_root(place), format!("`{name}` is not a fact; {known}")))
    }

    fn check_literal(
        &self,
        place: &IdedExpr,
        value: &LiteralValue,
    ) -> Result<(RuleExpr<T::Fact>, RuleValueType), RuleCompileError> {
        let literal = match value {
            LiteralValue::Boolean(bool) => RuleLiteral::Bool(*bool.inner()),
            LiteralValue::Int(int) => RuleLiteral::Int(*int.inner()),
            LiteralValue::Double(double) => RuleLiteral::Double(*double.inner()),
            LiteralValue::String(text) => RuleLiteral::Text(text.inner().into()),
            LiteralValue::Null => {
                return Err(
                    self.error_at(place, "nothing is null; a fact that is missing is empty, or 0")
                );
            }
            LiteralValue::UInt(_) => {
                return Err(self.error_at(place, "write the number without `u`"));
            }
            LiteralValue::Bytes(_) => {
                return Err(self.error_at(place, "write the text without `b`"));
            }
        };
        let kind = literal.value_type();
        Ok((RuleExpr::Literal(literal), kind))
    }

    fn check_call(
        &mut self,
        place: &IdedExpr,
        call: &CallExpr,
    ) -> Result<(RuleExpr<T::Fact>, RuleValueType), RuleCompileError> {
        // The target of a method is the first argument, so `x.size()` and `size(x)` are checked alike.
        let arguments: Vec<_> = call.target.as_deref().into_iter().chain(&call.args).collect();
        match (call.func_name.as_str(), call.target.is_some(), &*arguments) {
            (operators::CONDITIONAL, false, [condition, yes, no]) => {
                self.check_conditional(place, condition, yes, no)
            }
            (operators::IN, false, [operand, list]) => self.check_in(place, operand, list),
            ("matches", _, [operand, pattern]) => self.check_matches(operand, pattern),
            (name, is_method, [operand]) => match unary_operator(name, is_method) {
                Some(unary) => self.check_unary(place, unary, operand),
                None => Err(self.unknown_name(place, name)),
            },
            (name, is_method, [left, right]) => match binary_operator(name, is_method) {
                Some(binary) => self.check_binary(place, binary, left, right),
                None => Err(self.unknown_name(place, name)),
            },
            (name, ..) => Err(self.unknown_name(place, name)),
        }
    }

    fn check_unary(
        &mut self,
        place: &IdedExpr,
        unary: UnaryOperator,
        operand: &IdedExpr,
    ) -> Result<(RuleExpr<T::Fact>, RuleValueType), RuleCompileError> {
        let (node, kind) = self.check_node(operand)?;
        let Some(result) = unary.result_type(kind) else {
            return Err(
                self.error_at(place, format!("this operation is not possible for {}", kind.name()))
            );
        };
        Ok((RuleExpr::Unary(unary, Box::new(node)), result))
    }

    fn check_binary(
        &mut self,
        place: &IdedExpr,
        binary: BinaryOperator,
        left: &IdedExpr,
        right: &IdedExpr,
    ) -> Result<(RuleExpr<T::Fact>, RuleValueType), RuleCompileError> {
        let ((one, one_kind), (other, other_kind)) =
            (self.check_node(left)?, self.check_node(right)?);
        let Some(kind) = binary.result_type(one_kind, other_kind) else {
            return Err(self.type_mismatch(place, one_kind, other_kind));
        };
        if matches!(binary, BinaryOperator::Equal | BinaryOperator::NotEqual) {
            self.check_allowed_value(right, &one, &other)?;
            self.check_allowed_value(left, &other, &one)?;
        }
        Ok((RuleExpr::Binary(binary, Box::new([one, other])), kind))
    }

    fn check_conditional(
        &mut self,
        place: &IdedExpr,
        condition: &IdedExpr,
        yes: &IdedExpr,
        no: &IdedExpr,
    ) -> Result<(RuleExpr<T::Fact>, RuleValueType), RuleCompileError> {
        let (condition, kind) = self.check_node(condition)?;
        let ((yes, yes_kind), (no, no_kind)) = (self.check_node(yes)?, self.check_node(no)?);
        if kind != RuleValueType::Bool {
            return Err(self.error_at(
                place,
                format!("before `?` stands {}; it has to be true or false", kind.name()),
            ));
        }
        if yes_kind != no_kind {
            return Err(self.type_mismatch(place, yes_kind, no_kind));
        }
        Ok((RuleExpr::Choose(Box::new([condition, yes, no])), yes_kind))
    }

    fn check_in(
        &mut self,
        place: &IdedExpr,
        operand: &IdedExpr,
        list: &IdedExpr,
    ) -> Result<(RuleExpr<T::Fact>, RuleValueType), RuleCompileError> {
        let Expr::List(list) = &list.expr else {
            return Err(
                self.error_at(place, "after `in` has to stand a list, such as `[\"a\", \"b\"]`")
            );
        };
        let (operand, kind) = self.check_node(operand)?;
        let mut nodes = Vec::with_capacity(list.elements.len());
        for element in &list.elements {
            let (node, other) = self.check_node(element)?;
            if !kind.is_comparable(other) {
                return Err(self.type_mismatch(element, kind, other));
            }
            self.check_allowed_value(element, &operand, &node)?;
            nodes.push(node);
        }
        Ok((RuleExpr::In(Box::new(operand), nodes.into()), RuleValueType::Bool))
    }

    fn check_matches(
        &mut self,
        operand: &IdedExpr,
        pattern: &IdedExpr,
    ) -> Result<(RuleExpr<T::Fact>, RuleValueType), RuleCompileError> {
        let (node, kind) = self.check_node(operand)?;
        if kind != RuleValueType::Text {
            return Err(self.error_at(operand, format!("a pattern cannot match {}", kind.name())));
        }
        // A literal pattern is compiled once, and its compiled size is bounded.
        let Expr::Literal(LiteralValue::String(text)) = &pattern.expr else {
            return Err(
                self.error_at(pattern, "write the pattern itself here, so that it can be checked")
            );
        };
        let regex =
            compile_regex(text.inner()).map_err(|problem| self.error_at(pattern, problem))?;
        Ok((RuleExpr::Matches(Box::new(node), regex), RuleValueType::Bool))
    }

    /// Rejects a comparison with a word that the fact can never have. The operator would not notice such a
    /// mistake, because the comparison always gives the same result.
    fn check_allowed_value(
        &self,
        place: &IdedExpr,
        fact: &RuleExpr<T::Fact>,
        word: &RuleExpr<T::Fact>,
    ) -> Result<(), RuleCompileError> {
        let (RuleExpr::Fact(fact), RuleExpr::Literal(RuleLiteral::Text(word))) = (fact, word)
        else {
            return Ok(());
        };
        match self.table.allowed_values(fact) {
            Some((name, words)) if !words.iter().any(|allowed| **allowed == **word) => {
                let words = words.join("`, `");
                Err(self
                    .error_at(place, format!("`{name}` is never `{word}`; it is one of `{words}`")))
            }
            _ => Ok(()),
        }
    }

    fn type_mismatch(
        &self,
        place: &IdedExpr,
        one: RuleValueType,
        other: RuleValueType,
    ) -> RuleCompileError {
        let (one_name, other_name) = (one.name(), other.name());
        let mut problem = format!("this operation is not possible for {one_name} and {other_name}");
        if one != other && one.is_comparable(other) {
            problem += "; write numbers as `1.0`, facts as `double(usage.turns)`";
        }
        self.error_at(place, problem)
    }

    fn unknown_name(&self, place: &IdedExpr, name: &str) -> RuleCompileError {
        self.error_at(
            place,
            format!("`{name}` is not known here; there are `{}`", RULE_FUNCTIONS.join("`, `")),
        )
    }

    fn error_at(&self, place: &IdedExpr, problem: impl Into<String>) -> RuleCompileError {
        let offset = self.source.offset_for(place.id).map_or(0, |(start, _)| start);
        // The parser counts its offsets in characters, not in bytes.
        let before: String = self.source.source.chars().take(offset as usize).collect();
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|character| *character != '\n').count() + 1;
        RuleCompileError { place: Some((line, column)), problem: problem.into() }
    }
}

/// Returns the parts of the dotted name that an expression spells. A part may also be written as `["part"]`.
fn dotted_path(expression: &Expr) -> Option<Vec<&str>> {
    match expression {
        Expr::Ident(name) => Some(vec![name]),
        Expr::Select(select) if !select.test => path_with_part(&select.operand, &select.field),
        Expr::Call(call) if call.func_name == operators::INDEX => match &*call.args {
            [operand, IdedExpr { expr: Expr::Literal(LiteralValue::String(name)), .. }] => {
                path_with_part(operand, name.inner())
            }
            _ => None,
        },
        _ => None,
    }
}

/// Returns the node at which a dotted name begins. The parser gives the whole name the position of its
/// last dot.
fn path_root(mut expression: &IdedExpr) -> &IdedExpr {
    loop {
        expression = match &expression.expr {
            Expr::Select(select) => &select.operand,
            Expr::Call(CallExpr { args, .. }) if !args.is_empty() => &args[0],
            _ => return expression,
        };
    }
}

fn path_with_part<'a>(operand: &'a IdedExpr, name: &'a str) -> Option<Vec<&'a str>> {
    let mut path = dotted_path(&operand.expr)?;
    path.push(name);
    Some(path)
}

fn unary_operator(name: &str, is_method: bool) -> Option<UnaryOperator> {
    match (name, is_method) {
        (operators::LOGICAL_NOT, false) => Some(UnaryOperator::Not),
        (operators::NEGATE, false) => Some(UnaryOperator::Negate),
        ("size", _) => Some(UnaryOperator::Size),
        ("double", false) => Some(UnaryOperator::Double),
        _ => None,
    }
}

fn binary_operator(name: &str, is_method: bool) -> Option<BinaryOperator> {
    match (name, is_method) {
        (operators::LOGICAL_AND, false) => Some(BinaryOperator::And),
        (operators::LOGICAL_OR, false) => Some(BinaryOperator::Or),
        (operators::EQUALS, false) => Some(BinaryOperator::Equal),
        (operators::NOT_EQUALS, false) => Some(BinaryOperator::NotEqual),
        (operators::LESS, false) => Some(BinaryOperator::Less),
        (operators::LESS_EQUALS, false) => Some(BinaryOperator::LessOrEqual),
        (operators::GREATER, false) => Some(BinaryOperator::Greater),
        (operators::GREATER_EQUALS, false) => Some(BinaryOperator::GreaterOrEqual),
        (operators::ADD, false) => Some(BinaryOperator::Add),
        (operators::SUBSTRACT, false) => Some(BinaryOperator::Subtract),
        (operators::MULTIPLY, false) => Some(BinaryOperator::Multiply),
        (operators::DIVIDE, false) => Some(BinaryOperator::Divide),
        (operators::MODULO, false) => Some(BinaryOperator::Remainder),
        ("startsWith", true) => Some(BinaryOperator::StartsWith),
        ("endsWith", true) => Some(BinaryOperator::EndsWith),
        ("contains", true) => Some(BinaryOperator::Contains),
        _ => None,
    }
}

fn compile_regex(pattern: &str) -> Result<Regex, String> {
    RegexBuilder::new(pattern).size_limit(MAX_REGEX_BYTES).build().map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => {
            format!(
                "the pattern takes more than {MAX_REGEX_BYTES} bytes when compiled; make it shorter"
            )
        }
        error => format!("the pattern is not a regular expression: {}", regex_error_reason(&error)),
    })
}

/// Returns the last line of a regex error. The other lines show the pattern.
fn regex_error_reason(error: &regex::Error) -> String {
    let text = error.to_string();
    text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

const RULE_FUNCTIONS: &[&str] =
    &["startsWith", "endsWith", "contains", "matches", "size", "double"];

/// The longest condition, in bytes. Our choice, like the other limits here: ten times the length of a
/// condition that a person can read.
const MAX_CONDITION_BYTES: usize = 2048;

/// The most opening brackets in a condition. The limit bounds the stack that the parser needs.
const MAX_BRACKETS: usize = 32;

/// The most nodes of a condition. The limit bounds the cost of evaluation, because each node is visited
/// at most once.
const MAX_NODES: usize = 256;

/// The stack of the parser's thread, in bytes: twice what the parser used for [`MAX_BRACKETS`] in an
/// unoptimised build.
const PARSER_STACK_BYTES: usize = 16 * 1024 * 1024;

/// The size of one compiled pattern, in bytes. A pattern of alternative model names needs some hundred
/// bytes.
const MAX_REGEX_BYTES: usize = 64 * 1024;
