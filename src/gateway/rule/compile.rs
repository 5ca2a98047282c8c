//! From the text of a condition to its tree: read by `cel`, then every name and type is checked.
//!
//! What is accepted is the part of CEL whose cost is plain to see: facts, literals, operators, tests
//! of texts. There are no macros, no maps, no concatenation and no functions that make anything
//! larger, so the cost of a condition is its size.
//!
//! **Invariant:** no text panics, hangs or exhausts the stack, whatever stands in it. The parser of
//! `cel` needs about 130 KiB of stack for each open bracket (measured, unoptimised) and checks its own
//! limit too late; so brackets are counted before it sees them, and it has a thread of its own.

use std::thread::{self, ScopedJoinHandle};

use cel::common::ast::{CallExpr, Expr, IdedExpr, LiteralValue, SourceInfo, operators};
use cel::parser::ParseErrors;
use regex::{Regex, RegexBuilder};

use super::expression::{Binary, Kind, Literal, Node, Unary};
use super::facts::Fact;

/// What is wrong with a condition, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// Line and column, counted from 1; `None` where it is the whole.
    pub place: Option<(usize, usize)>,
    pub problem: String,
}

/// The tree of a condition.
pub(super) fn compile(text: &str) -> Result<Node, Invalid> {
    if text.len() > MAX_BYTES {
        return Err(whole(format!("is {} bytes long, the limit is {MAX_BYTES}", text.len())));
    }
    let opened = text.bytes().filter(|byte| b"([{?".contains(byte)).count();
    if opened > MAX_BRACKETS {
        return Err(whole(format!(
            "has {opened} opening brackets and `?`, the limit is {MAX_BRACKETS}; make it two rules"
        )));
    }
    let compiling = thread::Builder::new().stack_size(STACK_BYTES);
    thread::scope(|scope| {
        match compiling.spawn_scoped(scope, || check(text)).map(ScopedJoinHandle::join) {
            Ok(Ok(result)) => result,
            Ok(Err(_panic)) => Err(whole("cannot be read; write it more simply".to_owned())),
            Err(error) => {
                Err(whole(format!("cannot be read: no thread could be started: {error}")))
            }
        }
    })
}

fn whole(problem: String) -> Invalid {
    Invalid { place: None, problem }
}

fn check(text: &str) -> Result<Node, Invalid> {
    // An environment without macros: what looks like one is a call of an unknown function.
    let parser = cel::Env::default().with_optional_support(false).parser();
    let (expression, source) =
        parser.parse_with_source_info(text).map_err(|errors| syntax(&errors))?;
    let mut checker = Checker { source, nodes: 0 };
    let (node, kind) = checker.node(&expression)?;
    if kind == Kind::Bool {
        Ok(node)
    } else {
        Err(whole(format!("is {}; it has to be true or false", kind.name())))
    }
}

/// The first error, without the list of everything that would have been possible.
fn syntax(errors: &ParseErrors) -> Invalid {
    let Some(first) = errors.errors.first() else { return whole("is not CEL".to_owned()) };
    let message = first.msg.trim_start_matches("Syntax error: ");
    let message = message.split(" expecting ").next().unwrap_or_default();
    let message = message.replace("mismatched input '<EOF>'", "it ends too early");
    let message = message.replace("'<EOF>'", "the end");
    let place = |(line, column)| Some((usize::try_from(line).ok()?, usize::try_from(column).ok()?));
    Invalid { place: place(first.pos), problem: format!("is not CEL: {message}") }
}

struct Checker {
    source: SourceInfo,
    nodes: usize,
}

impl Checker {
    fn node(&mut self, expression: &IdedExpr) -> Result<(Node, Kind), Invalid> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(whole(format!(
                "has more than {MAX_NODES} names, values and operators; make it two rules"
            )));
        }
        if let Some(path) = path(&expression.expr) {
            return self.fact(expression, &path);
        }
        match &expression.expr {
            Expr::Literal(value) => self.literal(expression, value),
            Expr::Select(_) => Err(self.at(expression, "only facts have parts")),
            Expr::Call(call) if call.func_name == operators::INDEX => {
                Err(self.at(expression, "only facts have parts"))
            }
            Expr::Call(call) => self.call(expression, call),
            Expr::List(_) => Err(self.at(expression, "a list may stand after `in` only")),
            _ => Err(self.at(expression, "maps and structs are not known here")),
        }
    }

    fn fact(&self, place: &IdedExpr, path: &[&str]) -> Result<(Node, Kind), Invalid> {
        if let ["run", "metadata", name] = path {
            return Ok((Node::Metadata((*name).into()), Kind::Text));
        }
        let name = path.join(".");
        if let Some(fact) = Fact::find(&name) {
            return Ok((Node::Fact(fact), fact.kind));
        }
        let parent = path[..path.len() - 1].join(".");
        let prefixes = [name.as_str(), parent.as_str()].into_iter();
        let known = prefixes
            .map(|prefix| (prefix, Fact::below(prefix)))
            .find(|(_, below)| !below.is_empty());
        let known = known.map_or_else(
            || "facts begin with `run`, `agent`, `request` or `usage`".to_owned(),
            |(prefix, below)| format!("`{prefix}` has `{}`", below.join("`, `")),
        );
        Err(self.at(root(place), format!("`{name}` is not a fact; {known}")))
    }

    fn literal(&self, place: &IdedExpr, value: &LiteralValue) -> Result<(Node, Kind), Invalid> {
        let literal = match value {
            LiteralValue::Boolean(bool) => Literal::Bool(*bool.inner()),
            LiteralValue::Int(int) => Literal::Int(*int.inner()),
            LiteralValue::Double(double) => Literal::Double(*double.inner()),
            LiteralValue::String(text) => Literal::Text(text.inner().into()),
            LiteralValue::Null => {
                return Err(
                    self.at(place, "nothing is null; a fact that is missing is empty, or 0")
                );
            }
            LiteralValue::UInt(_) => return Err(self.at(place, "write the number without `u`")),
            LiteralValue::Bytes(_) => return Err(self.at(place, "write the text without `b`")),
        };
        let kind = literal.kind();
        Ok((Node::Literal(literal), kind))
    }

    fn call(&mut self, place: &IdedExpr, call: &CallExpr) -> Result<(Node, Kind), Invalid> {
        let arguments: Vec<_> = call.target.as_deref().into_iter().chain(&call.args).collect();
        match (call.func_name.as_str(), call.target.is_some(), &*arguments) {
            (operators::CONDITIONAL, false, [condition, yes, no]) => {
                self.choose(place, condition, yes, no)
            }
            (operators::IN, false, [operand, list]) => self.within(place, operand, list),
            ("matches", _, [operand, pattern]) => self.matches(operand, pattern),
            (name, is_method, [operand]) => match unary(name, is_method) {
                Some(unary) => self.unary(place, unary, operand),
                None => Err(self.unknown(place, name)),
            },
            (name, is_method, [left, right]) => match binary(name, is_method) {
                Some(binary) => self.binary(place, binary, left, right),
                None => Err(self.unknown(place, name)),
            },
            (name, ..) => Err(self.unknown(place, name)),
        }
    }

    fn unary(
        &mut self,
        place: &IdedExpr,
        unary: Unary,
        operand: &IdedExpr,
    ) -> Result<(Node, Kind), Invalid> {
        let (node, kind) = self.node(operand)?;
        let Some(result) = unary.kind(kind) else {
            return Err(self.at(place, format!("this is not possible for {}", kind.name())));
        };
        Ok((Node::Unary(unary, Box::new(node)), result))
    }

    fn binary(
        &mut self,
        place: &IdedExpr,
        binary: Binary,
        left: &IdedExpr,
        right: &IdedExpr,
    ) -> Result<(Node, Kind), Invalid> {
        let ((one, one_kind), (other, other_kind)) = (self.node(left)?, self.node(right)?);
        let Some(kind) = binary.kind(one_kind, other_kind) else {
            return Err(self.unlike(place, one_kind, other_kind));
        };
        if matches!(binary, Binary::Equal | Binary::NotEqual) {
            self.check_word(right, &one, &other)?;
            self.check_word(left, &other, &one)?;
        }
        Ok((Node::Binary(binary, Box::new([one, other])), kind))
    }

    fn choose(
        &mut self,
        place: &IdedExpr,
        condition: &IdedExpr,
        yes: &IdedExpr,
        no: &IdedExpr,
    ) -> Result<(Node, Kind), Invalid> {
        let (condition, kind) = self.node(condition)?;
        let ((yes, yes_kind), (no, no_kind)) = (self.node(yes)?, self.node(no)?);
        if kind != Kind::Bool {
            return Err(self.at(
                place,
                format!("before `?` stands {}; it has to be true or false", kind.name()),
            ));
        }
        if yes_kind != no_kind {
            return Err(self.unlike(place, yes_kind, no_kind));
        }
        Ok((Node::Choose(Box::new([condition, yes, no])), yes_kind))
    }

    fn within(
        &mut self,
        place: &IdedExpr,
        operand: &IdedExpr,
        list: &IdedExpr,
    ) -> Result<(Node, Kind), Invalid> {
        let Expr::List(list) = &list.expr else {
            return Err(self.at(place, "after `in` has to stand a list, such as `[\"a\", \"b\"]`"));
        };
        let (operand, kind) = self.node(operand)?;
        let mut nodes = Vec::with_capacity(list.elements.len());
        for element in &list.elements {
            let (node, other) = self.node(element)?;
            if !kind.is_comparable(other) {
                return Err(self.unlike(element, kind, other));
            }
            self.check_word(element, &operand, &node)?;
            nodes.push(node);
        }
        Ok((Node::In(Box::new(operand), nodes.into()), Kind::Bool))
    }

    fn matches(&mut self, operand: &IdedExpr, pattern: &IdedExpr) -> Result<(Node, Kind), Invalid> {
        let (node, kind) = self.node(operand)?;
        if kind != Kind::Text {
            return Err(self.at(operand, format!("a pattern cannot match {}", kind.name())));
        }
        let Expr::Literal(LiteralValue::String(text)) = &pattern.expr else {
            return Err(
                self.at(pattern, "write the pattern itself here, so that it can be checked")
            );
        };
        let regex = regex(text.inner()).map_err(|problem| self.at(pattern, problem))?;
        Ok((Node::Matches(Box::new(node), regex), Kind::Bool))
    }

    /// A comparison with a word that the fact can never be is a mistake that nobody would notice.
    fn check_word(&self, place: &IdedExpr, fact: &Node, word: &Node) -> Result<(), Invalid> {
        let (Node::Fact(fact), Node::Literal(Literal::Text(word))) = (fact, word) else {
            return Ok(());
        };
        match fact.words() {
            Some(words) if !words.contains(&&**word) => Err(self.at(
                place,
                format!("`{}` is never `{word}`; it is one of `{}`", fact.name, words.join("`, `")),
            )),
            _ => Ok(()),
        }
    }

    fn unlike(&self, place: &IdedExpr, one: Kind, other: Kind) -> Invalid {
        let (one_name, other_name) = (one.name(), other.name());
        let mut problem = format!("this is not possible for {one_name} and {other_name}");
        if one != other && one.is_comparable(other) {
            problem += "; write numbers as `1.0`, facts as `double(usage.turns)`";
        }
        self.at(place, problem)
    }

    fn unknown(&self, place: &IdedExpr, name: &str) -> Invalid {
        self.at(
            place,
            format!("`{name}` is not known here; there are `{}`", FUNCTIONS.join("`, `")),
        )
    }

    fn at(&self, place: &IdedExpr, problem: impl Into<String>) -> Invalid {
        let offset = self.source.offset_for(place.id).map_or(0, |(start, _)| start);
        let before: String = self.source.source.chars().take(offset as usize).collect();
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|character| *character != '\n').count() + 1;
        Invalid { place: Some((line, column)), problem: problem.into() }
    }
}

/// The dotted name that an expression spells; a part may also be written as `["part"]`.
fn path(expression: &Expr) -> Option<Vec<&str>> {
    match expression {
        Expr::Ident(name) => Some(vec![name]),
        Expr::Select(select) if !select.test => part(&select.operand, &select.field),
        Expr::Call(call) if call.func_name == operators::INDEX => match &*call.args {
            [operand, IdedExpr { expr: Expr::Literal(LiteralValue::String(name)), .. }] => {
                part(operand, name.inner())
            }
            _ => None,
        },
        _ => None,
    }
}

/// Where a dotted name begins; the place of its last part is its last dot.
fn root(mut expression: &IdedExpr) -> &IdedExpr {
    loop {
        expression = match &expression.expr {
            Expr::Select(select) => &select.operand,
            Expr::Call(CallExpr { args, .. }) if !args.is_empty() => &args[0],
            _ => return expression,
        };
    }
}

fn part<'a>(operand: &'a IdedExpr, name: &'a str) -> Option<Vec<&'a str>> {
    let mut path = path(&operand.expr)?;
    path.push(name);
    Some(path)
}

fn unary(name: &str, is_method: bool) -> Option<Unary> {
    match (name, is_method) {
        (operators::LOGICAL_NOT, false) => Some(Unary::Not),
        (operators::NEGATE, false) => Some(Unary::Negate),
        ("size", _) => Some(Unary::Size),
        ("double", false) => Some(Unary::Double),
        _ => None,
    }
}

fn binary(name: &str, is_method: bool) -> Option<Binary> {
    match (name, is_method) {
        (operators::LOGICAL_AND, false) => Some(Binary::And),
        (operators::LOGICAL_OR, false) => Some(Binary::Or),
        (operators::EQUALS, false) => Some(Binary::Equal),
        (operators::NOT_EQUALS, false) => Some(Binary::NotEqual),
        (operators::LESS, false) => Some(Binary::Less),
        (operators::LESS_EQUALS, false) => Some(Binary::LessOrEqual),
        (operators::GREATER, false) => Some(Binary::Greater),
        (operators::GREATER_EQUALS, false) => Some(Binary::GreaterOrEqual),
        (operators::ADD, false) => Some(Binary::Add),
        (operators::SUBSTRACT, false) => Some(Binary::Subtract),
        (operators::MULTIPLY, false) => Some(Binary::Multiply),
        (operators::DIVIDE, false) => Some(Binary::Divide),
        (operators::MODULO, false) => Some(Binary::Remainder),
        ("startsWith", true) => Some(Binary::StartsWith),
        ("endsWith", true) => Some(Binary::EndsWith),
        ("contains", true) => Some(Binary::Contains),
        _ => None,
    }
}

fn regex(pattern: &str) -> Result<Regex, String> {
    RegexBuilder::new(pattern).size_limit(REGEX_BYTES).build().map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => {
            format!(
                "the pattern takes more than {REGEX_BYTES} bytes when compiled; make it shorter"
            )
        }
        error => format!("the pattern is not a regular expression: {}", reason(&error)),
    })
}

/// The last line of a regex error; the others draw the pattern.
fn reason(error: &regex::Error) -> String {
    let text = error.to_string();
    text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

const FUNCTIONS: &[&str] = &["startsWith", "endsWith", "contains", "matches", "size", "double"];

/// Ours, like the other limits here: ten times what a condition needs that a person can read.
const MAX_BYTES: usize = 2048;

/// Bounds the stack that the parser takes.
const MAX_BRACKETS: usize = 32;

/// Bounds the cost of asking: each node is visited once at most.
const MAX_NODES: usize = 256;

/// Twice what the parser took for [`MAX_BRACKETS`] in an unoptimised build.
const STACK_BYTES: usize = 16 * 1024 * 1024;

/// Of one compiled pattern. Names of models with alternatives take some hundred bytes.
const REGEX_BYTES: usize = 64 * 1024;
