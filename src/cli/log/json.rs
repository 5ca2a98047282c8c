//! A log line as one flat JSON object: when, how bad, what, and all that is known of it, the run's id and its trace's
//! included where the line is about a run.

use std::fmt;
use std::time::SystemTime;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormattedFields};
use tracing_subscriber::registry::{LookupSpan, Scope};

/// The format. What a line says itself wins over what its span says.
pub(super) struct JsonLogFormat;

/// Fields as JSON has them.
struct JsonLogFields(Map<String, Value>);

impl<S> FormatEvent<S, JsonFields> for JsonLogFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, JsonFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let time = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let mut line = JsonLogFields(Map::new());
        for span in context.event_scope().into_iter().flat_map(Scope::from_root) {
            let extensions = span.extensions();
            let told = extensions.get::<FormattedFields<JsonFields>>();
            let told = told.and_then(|fields| serde_json::from_str(&fields.fields).ok());
            line.0.extend(told.unwrap_or_else(Map::new));
        }
        event.record(&mut line);
        line.0.insert("time".to_owned(), time.into());
        line.0.insert("level".to_owned(), metadata.level().as_str().into());
        line.0.insert("target".to_owned(), metadata.target().into());
        writeln!(writer, "{}", Value::Object(line.0))
    }
}

impl Visit for JsonLogFields {
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.insert_field(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.insert_field(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.insert_field(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.insert_field(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.insert_field(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.insert_field(field, format!("{value:?}"));
    }
}

impl JsonLogFields {
    fn insert_field(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}
