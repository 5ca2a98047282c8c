//! The format of request bodies: a table of objects with their fields, and the comparison of a body with the table.

use std::collections::HashMap;
use std::fmt::{self, Write as _};

use serde_json::{Map, Value};

/// The objects of a provider's API, by name.
#[derive(Debug)]
pub(super) struct BodyFormat {
    objects: HashMap<&'static str, ObjectFormat>,
}

#[derive(Debug, Default)]
struct ObjectFormat {
    fields: Vec<FieldFormat>,
    /// True if the object may have fields that the table does not list.
    is_open: bool,
    /// The prefixes of the betas that allow the object; the request must name at least one of them. Empty if the object
    /// needs no beta.
    betas: Vec<&'static str>,
}

#[derive(Debug)]
struct FieldFormat {
    name: &'static str,
    is_required: bool,
    kinds: Vec<ValueKind>,
    /// The prefixes of the betas that allow the field; the request must name at least one of them. Empty if the field
    /// needs no beta.
    betas: Vec<&'static str>,
}

#[derive(Debug)]
enum ValueKind {
    Any,
    Null,
    Boolean,
    Integer,
    Number,
    String,
    /// One exact text.
    Literal(&'static str),
    List(Vec<Self>),
    /// An object with any fields.
    FreeObject,
    /// An object of the table.
    Object(&'static str),
}

/// A difference between a body and the format.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FormatFault {
    pub(super) path: BodyPath,
    pub(super) problem: FormatProblem,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum FormatProblem {
    UnknownField,
    MissingField,
    WrongType {
        /// The names of the allowed types.
        expected: Vec<&'static str>,
        actual: &'static str,
    },
    /// The text is none of the allowed texts.
    WrongText {
        /// The field that selects among objects, if the text is such a field's value.
        tag: Option<&'static str>,
        actual: String,
        allowed: Vec<&'static str>,
    },
}

/// The position of a value in a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BodyPath(Vec<PathStep>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum PathStep {
    Field(String),
    Index(usize),
}

impl BodyFormat {
    /// Reads a table. Its format is described in the table's own first lines.
    pub(super) fn parse(text: &'static str) -> Self {
        let mut objects: HashMap<&'static str, ObjectFormat> = HashMap::new();
        let mut name = "";
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let mut rest = line.trim();
            // A line without indentation begins an object; the other lines continue the object before them.
            if !line.starts_with(' ') {
                let (head, fields) = line.split_once(": ").expect("an entry has a name");
                let (object, betas) = split_betas(head);
                (name, rest) = (object, fields);
                objects.insert(name, ObjectFormat { betas, ..ObjectFormat::default() });
            }
            let object = objects.get_mut(name).expect("the first line begins an object");
            for field in rest.split(", ").map(|field| field.trim_end_matches(',')) {
                object.push_field(field);
            }
        }
        Self { objects }
    }

    /// Compares a body with an object of the table. `betas` are the values of `anthropic-beta`.
    pub(super) fn check(
        &self,
        object: &str,
        body: &Map<String, Value>,
        betas: &[&str],
    ) -> Result<(), FormatFault> {
        self.check_object(&self.objects[object], body, betas, &BodyPath::default())
    }

    fn check_object(
        &self,
        format: &ObjectFormat,
        body: &Map<String, Value>,
        betas: &[&str],
        path: &BodyPath,
    ) -> Result<(), FormatFault> {
        for field in format.fields.iter().filter(|field| field.is_required) {
            if !body.contains_key(field.name) {
                return Err(path.field(field.name).fault(FormatProblem::MissingField));
            }
        }
        for (name, value) in body {
            let known = format.fields.iter().find(|field| field.name == name);
            let path = path.field(name);
            match known.filter(|field| has_beta(&field.betas, betas)) {
                Some(field) => self.check_value(&field.kinds, value, betas, &path)?,
                None if format.is_open => (),
                None => return Err(path.fault(FormatProblem::UnknownField)),
            }
        }
        Ok(())
    }

    fn check_value(
        &self,
        kinds: &[ValueKind],
        value: &Value,
        betas: &[&str],
        path: &BodyPath,
    ) -> Result<(), FormatFault> {
        let fitting: Vec<_> = kinds.iter().filter(|kind| kind.has_type_of(value)).collect();
        if fitting.is_empty() {
            return Err(path.clone().fault(wrong_type(kinds, value)));
        }
        if let (Value::String(text), true) = (value, fitting.iter().all(|kind| kind.is_literal())) {
            return check_text(&fitting, text).map_err(|problem| path.clone().fault(problem));
        }
        if let Value::Object(body) = value {
            return self.check_variants(&fitting, body, betas, path);
        }
        if let Value::Array(items) = value {
            let lists: Vec<_> = fitting.iter().filter_map(|kind| kind.item_kinds()).collect();
            return first_fitting(lists, |kinds| {
                items.iter().enumerate().try_for_each(|(index, item)| {
                    self.check_value(kinds, item, betas, &path.index(index))
                })
            });
        }
        Ok(())
    }

    /// Compares an object with each kind that its tag selects. One of them has to fit.
    fn check_variants(
        &self,
        kinds: &[&ValueKind],
        body: &Map<String, Value>,
        betas: &[&str],
        path: &BodyPath,
    ) -> Result<(), FormatFault> {
        let formats: Vec<_> = kinds.iter().filter_map(|kind| kind.object_name()).collect();
        if formats.len() < kinds.len() {
            return Ok(());
        }
        let formats: Vec<_> = formats.iter().map(|name| &self.objects[name]).collect();
        let usable = formats.iter().filter(|format| has_beta(&format.betas, betas));
        let usable: Vec<&ObjectFormat> = usable.copied().collect();
        let selected: Vec<_> =
            usable.iter().copied().filter(|format| format.is_selected_by(body)).collect();
        if selected.is_empty() {
            return Err(wrong_variant(&usable, body, path));
        }
        first_fitting(selected, |format| self.check_object(format, body, betas, path))
    }
}

impl ObjectFormat {
    fn push_field(&mut self, text: &'static str) {
        let text = text.trim();
        if text == "*" {
            self.is_open = true;
            return;
        }
        // The betas may contain spaces, so that the kinds begin after the last space.
        let (head, kinds) = text.rsplit_once(' ').expect("a field has a kind");
        let (name, betas) = split_betas(head);
        self.fields.push(FieldFormat {
            name: name.trim_end_matches('!'),
            is_required: name.ends_with('!'),
            kinds: ValueKind::parse_all(kinds),
            betas,
        });
    }

    /// Returns true if each tag of the body is one of the format's tags. A tag is a field with fixed texts.
    fn is_selected_by(&self, body: &Map<String, Value>) -> bool {
        TAGS.iter().all(|tag| {
            let Some(field) = self.fields.iter().find(|field| field.name == *tag) else {
                return true;
            };
            match body.get(*tag) {
                None => !field.is_required,
                Some(value) => field.kinds.iter().any(|kind| kind.has_value(value)),
            }
        })
    }

    fn tag_texts(&self, tag: &str) -> impl Iterator<Item = &'static str> {
        let field = self.fields.iter().find(|field| field.name == tag);
        field.into_iter().flat_map(|field| field.kinds.iter().filter_map(ValueKind::literal))
    }
}

impl ValueKind {
    fn parse_all(text: &'static str) -> Vec<Self> {
        let (mut depth, mut start, mut kinds) = (0_usize, 0, Vec::new());
        for (at, letter) in text.char_indices() {
            match letter {
                '[' => depth += 1,
                ']' => depth -= 1,
                '|' if depth == 0 => {
                    kinds.push(Self::parse(&text[start..at]));
                    start = at + 1;
                }
                _ => (),
            }
        }
        kinds.push(Self::parse(&text[start..]));
        kinds
    }

    fn parse(text: &'static str) -> Self {
        let list = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        match text {
            "any" => Self::Any,
            "null" => Self::Null,
            "boolean" => Self::Boolean,
            "integer" => Self::Integer,
            "number" => Self::Number,
            "string" => Self::String,
            "object" => Self::FreeObject,
            _ if text.starts_with('"') => Self::Literal(text.trim_matches('"')),
            _ => list.map_or(Self::Object(text), |items| Self::List(Self::parse_all(items))),
        }
    }

    fn has_type_of(&self, value: &Value) -> bool {
        match self {
            Self::Any => true,
            Self::Null => value.is_null(),
            Self::Boolean => value.is_boolean(),
            // A number without a fraction is an integer, also if its text has a point.
            Self::Integer => value.as_f64().is_some_and(|number| number.fract() == 0.0),
            Self::Number => value.is_number(),
            Self::String | Self::Literal(_) => value.is_string(),
            Self::List(_) => value.is_array(),
            Self::FreeObject | Self::Object(_) => value.is_object(),
        }
    }

    /// Returns true if the kind allows the value of a tag.
    fn has_value(&self, value: &Value) -> bool {
        self.literal().map_or(self.has_type_of(value), |text| value == text)
    }

    fn is_literal(&self) -> bool {
        self.literal().is_some()
    }

    fn literal(&self) -> Option<&'static str> {
        if let Self::Literal(text) = self { Some(text) } else { None }
    }

    fn object_name(&self) -> Option<&'static str> {
        if let Self::Object(name) = self { Some(name) } else { None }
    }

    fn item_kinds(&self) -> Option<&[Self]> {
        if let Self::List(kinds) = self { Some(kinds) } else { None }
    }

    fn type_name(&self) -> &'static str {
        match self {
            Self::Any => "value",
            Self::Null => "null",
            Self::Boolean => "boolean",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::String | Self::Literal(_) => "string",
            Self::List(_) => "array",
            Self::FreeObject | Self::Object(_) => "object",
        }
    }
}

impl BodyPath {
    fn field(&self, name: &str) -> Self {
        self.with(PathStep::Field(name.to_owned()))
    }

    fn index(&self, index: usize) -> Self {
        self.with(PathStep::Index(index))
    }

    fn with(&self, step: PathStep) -> Self {
        let mut path = self.clone();
        path.0.push(step);
        path
    }

    fn fault(self, problem: FormatProblem) -> FormatFault {
        FormatFault { path: self, problem }
    }

    /// Returns the path as Anthropic writes it: `messages.0.content`.
    pub(super) fn dotted(&self) -> String {
        let steps: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        steps.join(".")
    }

    /// Returns the path as OpenAI writes it: `messages[0].content`.
    pub(super) fn bracketed(&self) -> String {
        self.0.iter().fold(String::new(), |mut text, step| {
            match step {
                PathStep::Index(index) => write!(text, "[{index}]"),
                PathStep::Field(name) if text.is_empty() => write!(text, "{name}"),
                PathStep::Field(name) => write!(text, ".{name}"),
            }
            .expect("writing to a text cannot fail");
            text
        })
    }
}

impl fmt::Display for PathStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(name) => f.write_str(name),
            Self::Index(index) => index.fmt(f),
        }
    }
}

/// Returns the JSON type of a value as the providers name it.
pub(super) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "decimal",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Splits `name{beta beta}` into the name and the betas. A mark behind the braces stays with the name.
fn split_betas(text: &'static str) -> (&'static str, Vec<&'static str>) {
    match text.split_once('{') {
        Some((name, betas)) => (name, betas.trim_end_matches('}').split(' ').collect()),
        None => (text, Vec::new()),
    }
}

/// Returns true if no beta is needed, or if one of the needed betas is on.
fn has_beta(needed: &[&str], betas: &[&str]) -> bool {
    needed.is_empty() || betas.iter().any(|beta| needed.iter().any(|need| beta.starts_with(need)))
}

/// Returns the first alternative's fault if no alternative fits.
fn first_fitting<T>(
    alternatives: Vec<T>,
    mut check: impl FnMut(T) -> Result<(), FormatFault>,
) -> Result<(), FormatFault> {
    let mut first = Ok(());
    for alternative in alternatives {
        match check(alternative) {
            Ok(()) => return Ok(()),
            Err(fault) if first.is_ok() => first = Err(fault),
            Err(_) => (),
        }
    }
    first
}

fn check_text(kinds: &[&ValueKind], text: &str) -> Result<(), FormatProblem> {
    let allowed: Vec<_> = kinds.iter().filter_map(|kind| kind.literal()).collect();
    if allowed.contains(&text) {
        return Ok(());
    }
    Err(FormatProblem::WrongText { tag: None, actual: text.to_owned(), allowed })
}

fn wrong_type(kinds: &[ValueKind], value: &Value) -> FormatProblem {
    let mut expected: Vec<_> = kinds.iter().map(ValueKind::type_name).collect();
    expected.dedup();
    expected.retain(|name| *name != "null");
    FormatProblem::WrongType { expected, actual: type_name(value) }
}

/// Makes the fault of an object whose tag selects no format.
fn wrong_variant(
    formats: &[&ObjectFormat],
    body: &Map<String, Value>,
    path: &BodyPath,
) -> FormatFault {
    // The tag that is at fault is the first whose value no format has.
    for tag in TAGS {
        let allowed: Vec<_> = formats.iter().flat_map(|format| format.tag_texts(tag)).collect();
        match body.get(tag).and_then(Value::as_str) {
            None if allowed.is_empty() => (),
            None => return path.field(tag).fault(FormatProblem::MissingField),
            Some(text) if allowed.contains(&text) => (),
            Some(text) => {
                let actual = text.to_owned();
                let problem = FormatProblem::WrongText { tag: Some(tag), actual, allowed };
                return path.clone().fault(problem);
            }
        }
    }
    path.clone().fault(FormatProblem::UnknownField)
}

/// The fields that select among several formats of an object.
const TAGS: [&str; 2] = ["type", "role"];
