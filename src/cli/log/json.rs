//! Log lines as flat JSON objects: time, level, target, message and all fields. A line about a run also has the run's
//! id and its trace's id.

use std::fmt;
use std::time::SystemTime;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormattedFields};
use tracing_subscriber::registry::{LookupSpan, Scope};

use crate::base::timestamp;

/// The line format. A field of the event overrides a field of its spans.
pub(super) struct JsonLogFormat;

/// The fields of a line as JSON values.
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
        let time = timestamp::format_rfc3339_millis(SystemTime::now()).to_string();
        let mut line = JsonLogFields(Map::new());
        // From the outermost span to the event, so that an inner value replaces an outer one.
        for span in context.event_scope().into_iter().flat_map(Scope::from_root) {
            let extensions = span.extensions();
            let formatted = extensions.get::<FormattedFields<JsonFields>>();
            let formatted = formatted.and_then(|fields| serde_json::from_str(&fields.fields).ok());
            line.0.extend(formatted.unwrap_or_else(Map::new));
        }
        event.record(&mut line);
        // These names are written last: no field may replace them.
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
