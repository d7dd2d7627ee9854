{{- define "shortfin-llm.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "shortfin-llm.selector" -}}
app.kubernetes.io/name: shortfin-llm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "shortfin-llm.labels" -}}
{{ include "shortfin-llm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}
